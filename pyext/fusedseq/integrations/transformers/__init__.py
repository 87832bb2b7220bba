"""`fused.attention` as an attention implementation of Hugging Face `transformers`."""

import importlib.metadata

OLDEST = (5, 23)
NAME = "fusedseq"

__all__ = ["NAME", "register"]


def register() -> None:
    """Makes `attn_implementation="fusedseq"` an attention implementation of `transformers`.

    Afterwards every model whose attention goes through `AttentionInterface` accepts the name, in
    `from_pretrained`, `from_config` and `set_attn_implementation`, and calls
    `fusedseq.fused.attention`. The masks come from a function that is registered with
    `AttentionMaskInterface`. Bloom has attention code of its own, which is replaced for models
    that are created afterwards. A second call changes nothing.

    Errors: ImportError if transformers is missing or older than 5.23. A model raises ValueError in
    its first forward pass for what the operator cannot compute: sparse
    attention, a paged cache, attention probabilities as an output, or a model class that has
    attention code of its own.
    """
    require_transformers()
    from transformers import AttentionInterface, AttentionMaskInterface

    from fusedseq.integrations.transformers import bloom
    from fusedseq.integrations.transformers.attention import attention_forward
    from fusedseq.integrations.transformers.masks import attention_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    bloom.replace()


def require_transformers() -> None:
    """Raises ImportError unless a version of transformers is installed that is known to work."""
    wanted = ".".join(map(str, OLDEST))
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"fusedseq.integrations.transformers needs transformers {wanted} or newer, and none is "
            f"installed: pip install 'transformers>={wanted},<6'"
        ) from None
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ImportError(
            f"fusedseq.integrations.transformers needs transformers {wanted} or newer, whose mask "
            f"functions get the position of the first query, got {version}"
        )
