"""en-fr/base in CTranslate2: the architecture and the weights of our Translator.

CTranslate2's TransformerSpec expresses this model completely: post-norm, ReLU, words times sqrt(E),
the table of our sinusoidal positions (CTranslate2's own has all sines before all cosines), biases
in every layer, and a bias of the output.
"""

import tempfile

import ctranslate2
import numpy as np
import torch
from ctranslate2.specs import TransformerSpec, common_spec
from fusedseq.data.parallel import END, START, UNKNOWN

LONGEST = 512  # the number of positions in the table


def settings():
    """Returns how CTranslate2 is run, for the result file."""
    return {"compute_type": "float32", "inter_threads": 1, "intra_threads": torch.get_num_threads()}


def array(t):
    return np.ascontiguousarray(t.detach().numpy())


def set_linear(spec, weight, bias):
    spec.weight, spec.bias = array(weight), array(bias)


def set_norm(spec, norm):
    spec.gamma, spec.beta = array(norm.weight), array(norm.bias)


def set_self_attention(spec, module, norm):
    """The projections of queries, keys and values are one product in both libraries."""
    set_linear(spec.linear[0], module.in_proj_weight, module.in_proj_bias)
    set_linear(spec.linear[1], module.out_proj.weight, module.out_proj.bias)
    set_norm(spec.layer_norm, norm)


def set_attention(spec, module, norm):
    """Attention to the source: one product of the queries, one of keys and values."""
    E = module.embed_dim
    set_linear(spec.linear[0], module.in_proj_weight[:E], module.in_proj_bias[:E])
    set_linear(spec.linear[1], module.in_proj_weight[E:], module.in_proj_bias[E:])
    set_linear(spec.linear[2], module.out_proj.weight, module.out_proj.bias)
    set_norm(spec.layer_norm, norm)


def set_feed_forward(spec, module, norm):
    set_linear(spec.linear_0, module.linear1.weight, module.linear1.bias)
    set_linear(spec.linear_1, module.linear2.weight, module.linear2.bias)
    set_norm(spec.layer_norm, norm)


def set_words(spec, words, positions):
    """words: models.translator.EmbeddedWords    positions: a PositionEncoderSpec"""
    spec.weight = array(words.embedding.weight)
    zeros = torch.zeros(1, LONGEST, words.embedding.embedding_dim)
    positions.encodings = array(words.positions(zeros)[0])


def specification(model, languages):
    """Returns the TransformerSpec of a Translator in eval mode.

    languages: its source and target Language
    Errors: ValueError for a model that differs from en-fr/base in more than its sizes
    """
    s = model.settings
    if s.prenorm or s.tied or s.positions != "sinusoidal":
        raise ValueError(
            "the model must be post-norm with sinusoidal positions and an output of its own, as "
            f"en-fr/base, got {s}"
        )
    spec = TransformerSpec.from_config(
        s.layers, s.heads, pre_norm=False, activation=common_spec.Activation.RELU
    )
    set_words(spec.encoder.embeddings[0], model.source_words, spec.encoder.position_encodings)
    set_words(spec.decoder.embeddings, model.target_words, spec.decoder.position_encodings)
    for target, layer in zip(spec.encoder.layer, model.encoder.layers, strict=True):
        set_self_attention(target.self_attention, layer.self_attn, layer.norm1)
        set_feed_forward(target.ffn, layer.feed_forward, layer.norm2)
    for target, layer in zip(spec.decoder.layer, model.decoder.layers, strict=True):
        set_self_attention(target.self_attention, layer.self_attn, layer.norm1)
        set_attention(target.attention, layer.multihead_attn, layer.norm2)
        set_feed_forward(target.ffn, layer.feed_forward, layer.norm3)
    set_linear(spec.decoder.projection, model.output_weight, model.output_bias)

    source, target = languages
    words = target.vocabulary.words
    spec.register_source_vocabulary(source.vocabulary.words)
    spec.register_target_vocabulary(words)
    # Our sources begin with START and end with END, our targets begin with START.
    spec.config.unk_token, spec.config.eos_token = words[UNKNOWN], words[END]
    spec.config.bos_token = spec.config.decoder_start_token = words[START]
    spec.config.add_source_bos = spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = model.encoder.layers[0].norm1.eps
    return spec


def translator(model, languages):
    """Returns CTranslate2's Translator of our model."""
    spec = specification(model, languages)
    spec.validate()
    spec.optimize()
    with tempfile.TemporaryDirectory(prefix="fusedseq-ctranslate2-") as folder:
        spec.save(folder)
        return ctranslate2.Translator(folder, device="cpu", **settings())


def search(translator, beam, batch, longest):
    """Returns a function that translates a list of sentences, each a list of words.

    The search ranks by log-probability, without a length penalty.
    longest: the most words of a translation
    """

    def translate(sentences):
        results = translator.translate_batch(
            sentences,
            max_batch_size=batch,
            beam_size=beam,
            length_penalty=0,
            max_decoding_length=longest,
        )
        return [result.hypotheses[0] for result in results]

    return translate
