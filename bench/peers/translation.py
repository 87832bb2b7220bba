"""Times greedy and beam translation with en-fr/base beside CTranslate2, at equal output.

Both get lists of words and return lists of words, in batches of the same size and of similar
length. Only the lines that both translate into the same words are timed.
"""

from functools import partial

from fusedseq.tasks.translation.search import Search, search_all

from bench.peers import turns

BEAMS = 1, 4
BATCH = 32
LONGEST = 100  # ids of a sentence, as in en-fr/base
# The part of the lines that both have to translate into the same words. Rounding decides where two
# words are nearly as likely; the beam searches differ in when they stop.
LEAST_EQUAL = {1: 0.95, 4: 0.9}


def case_name(beam):
    return f"translate-en-fr/base-{'greedy' if beam == 1 else f'beam{beam}'}"


def fused_search(model, languages, beam):
    """Returns a function that translates a list of sentences, each a list of words."""
    source, target = languages
    search = Search(beam=beam, length_penalty=0.0, batch=BATCH)

    def translate(sentences):
        found = search_all(model, [source.encode(words) for words in sentences], LONGEST, search)
        return [target.decode(hypotheses[0].ids) for hypotheses in found]

    return translate


def measure(ctranslate2_calls, loaded, beam, measuring_seconds):
    """Returns the row of a search in the result file.

    loaded: as `trained_translator.load` returns it
    Errors: ValueError if fewer translations are equal than LEAST_EQUAL says
    """
    model, languages, sentences = loaded
    peer = ctranslate2_calls.translator(model, languages)
    searches = {
        "fused": fused_search(model, languages, beam),
        "ctranslate2": ctranslate2_calls.search(peer, beam, BATCH, LONGEST - 2),
    }
    translations = [search(sentences) for search in searches.values()]
    same = [ours == theirs for ours, theirs in zip(*translations, strict=True)]
    equal = sum(same) / len(same)
    if equal < LEAST_EQUAL[beam]:
        raise ValueError(
            f"en-fr/base, beam {beam}: at least {LEAST_EQUAL[beam]:.0%} of the translations must "
            f"equal CTranslate2's, got {equal:.0%}"
        )
    chosen = [words for words, is_same in zip(sentences, same, strict=True) if is_same]
    written = [words for words, is_same in zip(translations[0], same, strict=True) if is_same]
    calls = {name: partial(search, chosen) for name, search in searches.items()}
    return {
        "name": case_name(beam),
        "op": "translate",
        "mode": "greedy" if beam == 1 else f"beam {beam}",
        "dtype": "float32",
        "lines": len(chosen),
        "tokens": sum(len(words) + 1 for words in written),  # with END
        "equal": equal,
        **turns.timed(calls, measuring_seconds),
    }
