"""The embedding's gradient on the device: the rows of the tokens that occur.

Shapes: T tokens of a pack that layers compute, H hidden size, V vocabulary.
"""

from torch import Tensor


def add_embedding_gradient(total_VH: Tensor, tokens_T: Tensor, grad_TH: Tensor, *, padding_idx: int | None) -> None:
    """total[tokens] += grad, in fp32 and in an order that does not change from run to run.

    tokens_T: on the CPU. padding_idx: a token whose row gets nothing, as in transformers.
    """
    grad_TH = grad_TH.float()
    if padding_idx is not None:
        rows = (tokens_T != padding_idx).nonzero()[:, 0]
        tokens_T, grad_TH = tokens_T[rows], grad_TH.index_select(0, rows.to(grad_TH.device))
    add_rows(total_VH, tokens_T.to(total_VH.device), grad_TH)


def add_rows(total: Tensor, rows_T: Tensor, values_TH: Tensor) -> None:
    """total[rows] += values, in an order that does not change from run to run. All three on one device."""
    if total.is_cuda:
        # on CUDA index_put_ sorts before it adds and index_add_ is atomic; on a CPU with several threads it is the
        # other way round
        total.index_put_((rows_T,), values_TH, accumulate=True)
    else:
        total.index_add_(0, rows_T, values_TH)
