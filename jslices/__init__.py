"""x"""
__version__ = "0.1.0"
from jslices._slices import IndexedSlices, concat_slices, is_slices
from jslices._grad.api import grad, value_and_grad, vjp
from jslices._lookup import embedding_lookup
from jslices._densify import DensificationWarning, DenseUseError
