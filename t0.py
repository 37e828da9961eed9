import jax, jax.numpy as jnp, numpy as np
from jslices import dynamic
ids=dynamic.id_map(64)
adm=jax.jit(lambda m,w:m.admit(w))
w=dynamic.wide_ids(np.array([5,2**40,5,-1,7]))
m,o=adm(ids,w); print(o); print(m.export())
m,o=adm(m,w); print(o.fresh,o.rows)
print(dynamic.wide_ids(["cat","dog"]).to_int64())
m,r=m.evict(dynamic.wide_ids([5])); print(r, m.export(), m.export(1))
