import torch
from torch import nn

from fusedseq import fused
from fusedseq.nn.dropout import check_probability, draw_seed


class Embedding(nn.Module):
    """A table of word vectors with embedding dropout (Merity et al., 2018): in training whole words are dropped with
    probability `dropout`, wherever they stand, and the others scaled by 1/(1-dropout).

    num_embeddings: V    embedding_dim: E    sparse: the weight's gradient as a sparse tensor of the rows used
    forward: int64 ids of any shape, in [0, V) -> (*shape, E)
    `weight` is (V, E), as in torch.nn.Embedding, and drawn from N(0, 1); a tied decoder uses it undropped.
    """

    def __init__(self, num_embeddings, embedding_dim, dropout=0.0, *, sparse=False, device=None, dtype=None, ops=fused):
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.sparse = num_embeddings, embedding_dim, sparse
        self.dropout = check_probability(dropout, "Embedding", "dropout")
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype))
        self._embedding = ops.embedding
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.weight)

    def forward(self, ids):
        if self.training and self.dropout:
            return self._embedding(ids, self.weight, self.dropout, draw_seed(ids.device), self.sparse)
        return self._embedding(ids, self.weight, sparse=self.sparse)

    def extra_repr(self):
        return f"{self.num_embeddings}, {self.embedding_dim}, dropout={self.dropout}"
