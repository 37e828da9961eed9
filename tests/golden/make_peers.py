"""Makes peers.json: what other libraries compute on gradients with duplicate ids.

    python make_peers.py torch    # torch 2.14.1, fbgemm-gpu-cpu 1.9.0, torchrec 1.9.2
                                  # (torchrec with --no-deps: it brings fbgemm-gpu)
    python make_peers.py keras    # keras 3.15.1 with tensorflow-cpu 2.21.0

Each in an environment with those libraries; each writes its own sections. All on a CPU.
FBGEMM's ADAM, PARTIAL_ROWWISE_ADAM, LAMB and PARTIAL_ROWWISE_LAMB refuse a CPU: theirs are
made here by the formulas of their templates (FBGEMM's main at 00c10a0,
fbgemm_gpu/codegen/genscript/optimizers.py), in float64, in the section ``fbgemm_formula``.
"""

import json
import pathlib
import sys
import warnings

import numpy as np

FILE = pathlib.Path(__file__).parent / "peers.json"
RATE, STEPS, DECAY = 0.1, 20, 0.05
SCALES = (1.0, 1e-2, 1e-4, 1e-6, 1e-8)


def inputs():
    """A table of 6 rows: row 5 is never looked up, row 4 in three steps alone."""
    rng = np.random.RandomState(72)
    start = rng.normal(size=(6, 4)).astype("float32")
    ids = rng.choice(4, (STEPS, 5))
    ids[[2, 9, 10], 0] = 4
    grads = rng.normal(size=(STEPS, 5, 4)).astype("float32")
    return start, ids, grads


START, IDS, GRADS = inputs()


def encoded(x):
    if isinstance(x, dict):
        return {key: encoded(value) for key, value in x.items()}
    if not isinstance(x, np.ndarray):
        return x
    flat = x.ravel()
    if np.iscomplexobj(x):
        flat = flat.view(flat.real.dtype)
    values = flat.tolist() if flat.dtype.kind in "iu" else [float(str(v)) for v in flat]
    values = [v if np.isfinite(v) else str(v) for v in values]
    return {"d": str(x.dtype), "s": list(x.shape), "v": values}


def write(**sections):
    old = json.loads(FILE.read_text()) if FILE.exists() else {}
    new = {**old, **encoded(sections)}
    FILE.write_text(json.dumps(new, separators=(",", ":"), sort_keys=True) + "\n")


# FBGEMM's formulas


def summed(ids, grads):
    """The distinct rows, and the sum of the gradients of each."""
    rows, places = np.unique(ids, return_inverse=True)
    sums = np.zeros((len(rows), grads.shape[1]), "float32")
    np.add.at(sums, places, grads)
    return rows, sums.astype("float64")


def formula(name, scale, decay=0.0, by_row=False, eps=1e-8, start=START):
    """Adam's four relatives: bias corrections count steps from 1, or those of a row."""
    partial, lamb = name.startswith("PARTIAL"), name.endswith("LAMB")
    b1, b2 = (np.float64(np.float32(b)) for b in (0.9, 0.999))
    p, first = start.astype("float64"), np.zeros(start.shape)
    second = np.zeros((len(start), 1 if partial else start.shape[1]))
    counts = np.zeros((len(start), 1))
    for step, (ids, grads) in enumerate(zip(IDS, GRADS, strict=True), 1):
        rows, g = summed(ids, grads * np.float32(scale))
        counts[rows] += 1
        t = counts[rows] if by_row else step
        square = (g**2).mean(1, keepdims=True) if partial else g**2
        first[rows] = b1 * first[rows] + (1 - b1) * g
        second[rows] = b2 * second[rows] + (1 - b2) * square
        root = np.sqrt(second[rows] / (1 - b2**t)) + eps
        u = first[rows] / (1 - b1**t) / root + decay * p[rows]
        if lamb:
            norms = [np.linalg.norm(x, axis=1, keepdims=True) for x in (p[rows], u)]
            u *= norms[0] / norms[1]
        p[rows] -= RATE * u
    return p.astype("float32")


def formulas():
    settings = {
        "ADAM": {},
        "ADAM, weight_decay": {"decay": DECAY},
        "ADAM, use_rowwise_bias_correction": {"by_row": True},
        "PARTIAL_ROWWISE_ADAM": {},
        "PARTIAL_ROWWISE_ADAM, weight_decay": {"decay": DECAY},
        "LAMB": {},
        "PARTIAL_ROWWISE_LAMB": {},
    }
    runs = {
        name: {str(s): formula(name.split(",")[0], s, **kwargs) for s in SCALES}
        for name, kwargs in settings.items()
    }
    zeros = {"1.0": formula("LAMB", 1.0, start=np.zeros_like(START))}
    return runs | {"LAMB, rows of zeros": zeros}


# FBGEMM and PyTorch


def with_fbgemm():
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
        WeightDecayMode,
    )

    def layer(optimizer, start, pooling=PoolingMode.SUM, **options):
        made = SplitTableBatchedEmbeddingBagsCodegen(
            [(*start.shape, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=getattr(EmbOptimType, optimizer),
            pooling_mode=pooling,
            **options,
        )
        made.split_embedding_weights()[0].data.copy_(torch.tensor(start))
        return made

    def table(made):
        return made.split_embedding_weights()[0].detach().numpy().copy()

    def backward(made, ids, grads):
        out = made(torch.tensor(ids), torch.arange(len(ids) + 1))
        (out * torch.tensor(grads)).sum().backward()

    def run(optimizer, scale, **options):
        made = layer(optimizer, START, learning_rate=RATE, **options)
        for ids, grads in zip(IDS, GRADS, strict=True):
            backward(made, ids, grads * np.float32(scale))
        return table(made)

    # Decay has no effect in the kernel for a pooled float32 table of one feature.
    decays = {"pooling": PoolingMode.NONE, "weight_decay": DECAY}
    settings = {
        "EXACT_SGD": ("EXACT_SGD", (1.0,), {}),
        "EXACT_ADAGRAD": ("EXACT_ADAGRAD", SCALES, {}),
        "EXACT_ROWWISE_ADAGRAD": ("EXACT_ROWWISE_ADAGRAD", SCALES, {}),
        "EXACT_ROWWISE_ADAGRAD, L2": (
            "EXACT_ROWWISE_ADAGRAD",
            SCALES,
            {"weight_decay_mode": WeightDecayMode.L2, **decays},
        ),
        "EXACT_ROWWISE_ADAGRAD, DECOUPLE": (
            "EXACT_ROWWISE_ADAGRAD",
            SCALES,
            {"weight_decay_mode": WeightDecayMode.DECOUPLE, **decays},
        ),
        "EXACT_SGD, gradient_clipping": (
            "EXACT_SGD",
            (1.0,),
            {"gradient_clipping": True, "max_gradient": 0.5},
        ),
    }
    runs = {
        name: {str(s): run(optimizer, s, **options) for s in scales}
        for name, (optimizer, scales, options) in settings.items()
    }

    counts = {}
    for optimizer in ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"):
        made = layer(optimizer, START)
        for _ in range(3):
            backward(made, IDS[0], GRADS[0])
        trained = int(made.iter[0])
        made.eval()
        with torch.no_grad():
            made(torch.tensor(IDS[0]), torch.arange(len(IDS[0]) + 1))
        counts[optimizer] = {"3 steps": trained, "and a forward": int(made.iter[0])}

    made = layer(
        "EXACT_SGD",
        np.zeros((6, 4), "float32"),
        learning_rate=1.0,
        gradient_clipping=True,
        max_gradient=1.0,
    )
    weights = {"per_sample_weights": torch.tensor([2.0, 0.25, 1.0])}
    out = made(torch.tensor([2, 2, 3]), torch.tensor([0, 2, 3]), **weights)
    (out * torch.tensor([[3.0], [0.5]])).sum().backward()
    clipped = table(made)[:, 0]

    refuse = {}
    for optimizer in ("ADAM", "PARTIAL_ROWWISE_ADAM", "LAMB", "PARTIAL_ROWWISE_LAMB"):
        try:
            layer(optimizer, START)
        except AssertionError as error:
            refuse[optimizer] = str(error)

    mean = layer(
        "EXACT_SGD", np.arange(24, dtype="float32").reshape(6, 4), PoolingMode.MEAN
    )
    weights = {"per_sample_weights": torch.tensor([3.0, 1.0])}
    mean = mean(torch.tensor([1, 3]), torch.tensor([0, 2]), **weights).detach().numpy()

    bounds = {}
    for mode in ("FATAL", "WARNING", "IGNORE"):
        for bad in (6, -1, -2):
            options = {"bounds_check_mode": BoundsCheckMode[mode], "learning_rate": 1.0}
            made = layer("EXACT_SGD", np.zeros((6, 4), "float32"), **options)
            try:
                backward(made, np.array([2, bad]), np.ones((2, 4), "float32"))
                bounds[f"{mode} {bad}"] = table(made)[:, 0]
            except RuntimeError:
                bounds[f"{mode} {bad}"] = "raises"
    return {
        "fbgemm": runs,
        "fbgemm_iter": counts,
        "fbgemm_on_a_cpu": refuse,
        "fbgemm_mean": {
            "ids": np.array([1, 3]),
            "weights": np.array([3.0, 1]),
            "out": mean,
        },
        "fbgemm_bounds": bounds,
        "fbgemm_clipped_bags": clipped,
    }


def with_torch():
    import torch

    def run(make, scale, sparse=True, start=START, as_complex=False):
        table = torch.nn.Parameter(torch.tensor(start))
        optimizer = make([table])
        for ids, grads in zip(IDS, GRADS, strict=True):
            grads = torch.tensor(grads * np.float32(scale))
            if as_complex:
                grads = torch.view_as_complex(grads.reshape(-1, 2, 2))
            table.grad = torch.sparse_coo_tensor(ids[None], grads, table.shape)
            if not sparse:
                table.grad = table.grad.to_dense()
            optimizer.step()
        return table.detach().numpy().copy()

    optim = torch.optim
    made = {
        "SparseAdam": lambda p: optim.SparseAdam(p, lr=RATE),
        "Adagrad": lambda p: optim.Adagrad(p, lr=RATE),
        "SGD": lambda p: optim.SGD(p, lr=RATE),
        "SGD, momentum": lambda p: optim.SGD(p, lr=RATE, momentum=0.9),
    }
    scales = {name: (1.0,) if "SGD" in name else SCALES for name in made}
    runs = {
        name: {str(s): run(make, s) for s in scales[name]} for name, make in made.items()
    }

    # A table of complex numbers, and the same one of pairs of real numbers.
    makes = {
        "Adam": lambda p: optim.Adam(p, lr=RATE),
        "Adagrad": lambda p: optim.Adagrad(p, lr=RATE),
        "RMSprop": lambda p: optim.RMSprop(p, lr=RATE),
        "Adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    }
    pairs = START.view("complex64")
    of_complex = {
        name: {
            "complex": run(make, 1.0, False, pairs, True),
            "real": run(make, 1.0, False),
        }
        for name, make in makes.items()
    }

    layer = torch.nn.Embedding(3, 2, sparse=True, max_norm=1.0)
    weight = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    layer.weight.data.copy_(weight)
    rows = layer(torch.tensor([1]))
    rows[0, 0].backward()
    max_norm = {
        "row": weight.numpy()[1],
        "read": rows.detach().numpy()[0],
        "grad": layer.weight.grad.to_dense().numpy()[1],
        "row_after": layer.weight.detach().numpy()[1],
    }

    table = torch.nn.Parameter(torch.zeros(6, 4))
    grads = torch.tensor(GRADS[0])
    table.grad = torch.sparse_coo_tensor(IDS[:1], grads, table.shape)
    try:
        norm = torch.nn.utils.clip_grad_norm_([table], 1.0)
        clipped = {
            "norm": norm.numpy().reshape(1),
            "grad": table.grad.to_dense().numpy(),
        }
    except (NotImplementedError, RuntimeError) as error:
        clipped = {"raises": type(error).__name__}
    return {
        "torch": runs,
        "torch_complex": of_complex,
        "torch_max_norm": max_norm,
        "torch_clip_grad_norm": clipped,
    }


def with_torchrec():
    """Two tables, one of them for two features, after three and after five steps."""
    import gc

    import torch
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        SplitTableBatchedEmbeddingBagsCodegen,
    )
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
    from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule
    from torchrec.optim import RowWiseAdagrad
    from torchrec.sparse.jagged_tensor import JaggedTensor

    values = np.array([1, 4, 1, 1, 2, 2, 3, 3, 5])
    lengths = np.array([1, 2, 0, 2, 3, 1])  # two bags of each feature
    keys = ["user", "friend", "item"]
    kjt = KeyedJaggedTensor.from_lengths_sync(
        keys=keys, values=torch.tensor(values), lengths=torch.tensor(lengths)
    )

    def config(name, rows, features):
        return EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=4, feature_names=features
        )

    configs = [config("user", 6, ["user", "friend"]), config("item", 8, ["item"])]
    fused = FusedEmbeddingBagCollection(
        tables=configs, optimizer_type=RowWiseAdagrad, optimizer_kwargs={"lr": RATE}
    )
    tables = {"user": START, "item": np.concatenate([START[2:], START[:4]])}
    weights = {f"embedding_bags.{name}.weight": x for name, x in tables.items()}
    fused.load_state_dict({key: torch.tensor(x) for key, x in weights.items()})
    found = {"values": values, "lengths": lengths, "start": tables}
    for number in range(1, 6):
        out = fused(kjt)
        if number == 1:
            found["out"] = {key: x.detach().numpy() for key, x in out.to_dict().items()}
        (out.values() ** 2).sum().backward()
        if number in (3, 5):
            state = fused.fused_optimizer().state_dict()["state"]
            slots = {key: x for each in state.values() for key, x in each.items()}
            found[f"after_{number}"] = {
                "tables": {
                    name: fused.state_dict()[f"embedding_bags.{name}.weight"].numpy().copy()
                    for name in tables
                },
                "slots": {key: x.detach().numpy().copy() for key, x in slots.items()},
            }
    kernels = (
        x for x in gc.get_objects() if isinstance(x, SplitTableBatchedEmbeddingBagsCodegen)
    )
    found["eps"] = sorted({x.optimizer_args.eps for x in kernels})
    found["eps_of_the_class"] = RowWiseAdagrad(
        [torch.nn.Parameter(torch.ones(2, 2))]
    ).defaults["eps"]

    plain = EmbeddingBagCollection(tables=configs)
    optimizer = RowWiseAdagrad(plain.parameters(), lr=RATE)
    (plain(kjt).values() ** 2).sum().backward()
    optimizer.step()
    slots = optimizer.state_dict()["state"][0]
    found["unfused"] = {name: list(x.shape) for name, x in slots.items()}

    def jagged(ids):
        lengths = torch.ones(len(ids), dtype=torch.int64)
        return {"f": JaggedTensor(values=torch.tensor(ids), lengths=lengths)}

    options = {"zch_size": 8, "device": torch.device("cpu")}
    mch = MCHManagedCollisionModule(
        eviction_policy=LRU_EvictionPolicy(), eviction_interval=1, **options
    )
    for _ in range(2):
        mch.profile(jagged([5, 7, 2**33]))
    found["mch"] = mch.remap(jagged([5, 7, 2**33, 99, 98]))["f"].values().numpy()
    mpzch = HashZchManagedCollisionModule(total_num_buckets=2, is_inference=True, **options)
    mpzch.eval()
    owners = np.arange(1000, 1008)
    mpzch._hash_zch_identities.copy_(torch.tensor(owners)[:, None])
    found["mpzch"] = mpzch.remap(jagged([1000, 1003, 99]))["f"].values().numpy()
    return {"torchrec": found}


def of_torch():
    from importlib.metadata import version

    import fbgemm_gpu
    import torch

    warnings.simplefilter("ignore")
    versions = {"torch": torch.__version__.partition("+")[0]}
    versions |= {"fbgemm-gpu-cpu": fbgemm_gpu.__version__, "torchrec": version("torchrec")}
    write(
        start=START,
        ids=IDS,
        grads=GRADS,
        decay=DECAY,
        rate=RATE,
        versions_torch=versions,
        fbgemm_formula=formulas(),
        **with_fbgemm(),
        **with_torch(),
        **with_torchrec(),
    )


# Keras on TensorFlow


def of_keras():
    import os

    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import tensorflow as tf

    ids, values = np.array([1, 1, 1, 2]), np.array([[1.0], [2.0], [-1.0], [1.0]], "float32")

    def steps(optimizer, as_array, wanted=3):
        table = keras.Variable(np.ones((3, 1), "float32"))
        grad = tf.IndexedSlices(tf.constant(values), tf.constant(ids), tf.constant([3, 1]))
        for _ in range(wanted):
            g = tf.convert_to_tensor(grad) if as_array else grad
            optimizer.apply_gradients([(g, table)])
        return keras.ops.convert_to_numpy(table)[:, 0]

    make = keras.optimizers
    makes = {
        "Adam": lambda: make.Adam(0.1),
        "Adagrad": lambda: make.Adagrad(0.1),
        "RMSprop": lambda: make.RMSprop(0.1),
        "Adadelta": lambda: make.Adadelta(1.0),
        "Nadam": lambda: make.Nadam(0.1),
        "Adamax": lambda: make.Adamax(0.1),
        "Ftrl": lambda: make.Ftrl(0.1),
        "Ftrl, beta": lambda: make.Ftrl(0.1, beta=0.5),
        "Lamb": lambda: make.Lamb(0.1),
        "Adafactor": lambda: make.Adafactor(0.1),
        "SGD": lambda: make.SGD(0.1),
        "SGD, momentum": lambda: make.SGD(0.1, momentum=0.9),
        "SGD, clipnorm": lambda: make.SGD(0.1, clipnorm=1.0),
    }
    runs = {
        name: {"slices": steps(made(), False), "array": steps(made(), True)}
        for name, made in makes.items()
    }

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = tf.compat.v1.get_variable("t", initializer=np.ones((3, 1), "float32"))
        grad = tf.IndexedSlices(tf.constant(values), tf.constant(ids), tf.constant([3, 1]))
        step = tf.compat.v1.train.AdamOptimizer(0.1).apply_gradients([(grad, table)])
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(3):
            session.run(step)
        first = session.run(table)[:, 0]
    versions = {"keras": keras.__version__, "tensorflow": tf.__version__}
    write(
        keras={"ids": ids, "values": values, **runs},
        tf1_adam=first,
        versions_keras=versions,
    )


if __name__ == "__main__":
    {"torch": of_torch, "keras": of_keras}[sys.argv[1]]()
