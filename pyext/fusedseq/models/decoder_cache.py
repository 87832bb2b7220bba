"""The keys and values of all layers of a Transformer decoder during incremental decoding."""

from torch import Tensor

from fusedseq.nn import KeyValueCache


class DecoderCache:
    """The caches of the layers of a Decoder.

    layers: for each layer the KeyValueCaches of the target positions and of the encoder's output
    memory_lengths: (rows,) int64 or None, the source length of each hypothesis
    length: the number of target positions in the cache
    """

    def __init__(
        self, layers: list[tuple[KeyValueCache, KeyValueCache]], memory_lengths: Tensor | None
    ) -> None:
        self.layers, self.memory_lengths, self.length = layers, memory_lengths, 0

    def share_memory(self, beam: int) -> None:
        """Makes `beam` hypotheses read the encoder's output of each source sentence."""
        sentences = self.layers[0][1].table()[:, 0]
        self._reorder_memory(sentences.repeat_interleave(beam))

    def reorder(self, parents: Tensor) -> None:
        """Makes hypothesis b continue what hypothesis parents[b] was; parents: (rows,) int64."""
        for target_cache, _ in self.layers:
            target_cache.reorder(parents)
        self._reorder_memory(parents)

    def _reorder_memory(self, parents: Tensor) -> None:
        for _, memory_cache in self.layers:
            memory_cache.reorder(parents)
        if self.memory_lengths is not None:
            self.memory_lengths = self.memory_lengths[parents]
