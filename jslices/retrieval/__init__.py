"""What a trained table recommends: the best rows, ranks of held-out ones, an in-batch loss.

Import it by itself::

    from jslices.retrieval import in_batch_softmax_loss, ranks, top_k
"""

from jslices.retrieval.loss import in_batch_softmax_loss as in_batch_softmax_loss
from jslices.retrieval.search import ranks as ranks
from jslices.retrieval.search import top_k as top_k
