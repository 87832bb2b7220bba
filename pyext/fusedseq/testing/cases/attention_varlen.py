"""Cases of `attention_varlen`."""

import torch

from fusedseq.testing.cases.attention import option_tensor, setting_words
from fusedseq.testing.cases.case import Case, join


def varlen_case(queries, keys, N, D, *options, N_kv=None, spare=None, **settings):
    """A case of sequences with these numbers of queries and of keys.

    options, N_kv: as of `attention_case`; dimensions that are not broadcast have the sizes of the
        padded batch
    spare: by how much max_seqlen is larger than the longest sequence; None: it is not given
    settings: the operator's other options
    """
    L, S = (max(lengths, default=0) + (spare or 0) for lengths in (queries, keys))

    def make(randn):
        q = randn(sum(queries), N, D)
        k, v = (randn(sum(keys), N_kv or N, D) for _ in range(2))
        ends = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (queries, keys)]
        longest = [] if spare is None else [L, S]
        B = len(queries)
        tensors = dict(option_tensor(randn, option, B, N, L, S, D) for option in options)
        return (q, k, v, *ends, *longest), settings | tensors

    name = join(
        f"N{N}-D{D}",
        "L" + "_".join(map(str, queries)),
        "S" + "_".join(map(str, keys)),
        *options,
        f"Nkv{N_kv}" * (N_kv is not None),
        f"spare{spare}" * (spare is not None),
        *setting_words(settings),
    )
    return Case("attention_varlen", name, make)


MIXED = (5, 0, 33, 1, 60)
CASES = [
    varlen_case((3, 5, 2), (3, 5, 2), 2, 4, spare=0),
    varlen_case(MIXED, MIXED, 2, 6, causal=True),
    varlen_case((4, 0, 20), (7, 9, 0), 4, 5, N_kv=2),
    varlen_case((1, 1, 0, 1), (8, 40, 3, 0), 2, 8, causal=True),
    varlen_case((2, 0, 1), (2, 3, 1), 1, 4),
    varlen_case((), (), 2, 4),
    varlen_case((0, 0), (3, 0), 2, 4),
    varlen_case(MIXED, MIXED, 2, 6, "alibi", "sinks", dropout=0.3, seed=3, spare=3),
    varlen_case((2, 20), (30, 20), 2, 6, "rope", N_kv=1, spare=0, causal=True, window=(9, 0)),
    varlen_case(MIXED, MIXED, 2, 6, "relative2", "biasBNLS", "mask", softcap=1.5),
    varlen_case((9, 30), (9, 31), 2, 6, "biasNLS", window=(3, 5), dropout=0.2, seed=2),
    varlen_case((90,), (90,), 1, 20),
]
