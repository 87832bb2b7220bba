"""What the settings of a reproduction do not say, reworded from the `note` of its result file. An
empty text stands for a note that the page itself replaces.
"""

BUSY = "One thread, while other runs used the machine."
WORDS = (
    "A vocabulary of 5,000 words and batches of 512 instead of 2,048. The learning rate of .001 is "
    "the "
    "one that the course's code may have had. " + BUSY
)
PTB = "Batches of 20 instead of 70, which makes 3.5 times as many steps per epoch. " + BUSY
SMALL_EN_ES = "A small model. "
HEAD_SCALE = (
    "Attention is scaled by the root of a head's width instead of the whole embedding's, which the "
    "source "
    "report prints: the reported values lie between those of the two scalings."
)

NOTES = {
    "words-base-vocabulary-5000": WORDS,
    "words-feedforward": WORDS,
    "words-layers-1": WORDS + " The model is the same as that of words/base.",
    "words-layers-4-vocabulary-5000": WORDS,
    "words-layers-4-two-epochs": WORDS,
    "words-prenorm-4-vocabulary-5000": WORDS,
    "words-adapt": "Starts from words/layers-4 after one epoch, then one epoch on both domains, "
    "the news "
    "with the model's own labels. Without these labels (words/layers-4, two epochs) the news "
    "accuracy is "
    "30.32 %. " + WORDS,
    "words-adapt-finetune": "Starts from words/layers-4 after one epoch, then one epoch on the "
    "news alone, "
    "with its own labels, at a tenth of the learning rate. The news accuracy was 28.46 % before. A "
    "vocabulary of 5,000 words and batches of 512. " + BUSY,
    "words-ensemble": "Six runs of this page: layers-4 with two epochs (alone 30.32 %), and "
    "layers-4, "
    "prenorm-4, base, feedforward and layers-1 with one (28.0 to 28.6 %; base and layers-1 are the "
    "same "
    "model). Settings, steps and time are those of the first.",
    "ptb-lstm": PTB + " Interrupted after 4 epochs and resumed.",
    "ptb-awd": PTB + " Interrupted after 4 epochs and resumed.",
    "ptb-mogrifier-awd": PTB + " Interrupted after 2 epochs and resumed.",
    "reverse-base": "",  # the seeds, which the page shows together
    "reverse-base-head-scale-seed-0": HEAD_SCALE,
    "reverse-base-head-scale-seed-1": HEAD_SCALE,
    "reverse-base-head-scale-seed-2": HEAD_SCALE,
    "reverse-tuned": "Interrupted once and resumed, while other runs used the machine.",
    "reverse-tuned-seed-1": "One number of 17,475 is wrong. Other runs used the machine.",
    "reverse-tuned-found": "The configuration that the study found, for 60 epochs, with seed 1. "
    "With seeds "
    "0, 2, 3 and 4, and other data each, 1, 2, 7 and 1 numbers of 17,475 are wrong.",
    "reverse-tune": "30 trials of 10 epochs over embedding 256 to 1,024, layers, feed-forward "
    "width, heads, "
    "dropout, mask and, beyond the source report's search space, learning rates of 1e-5 to 3e-4. "
    "The best: "
    "embedding 512, 4 heads, 4 layers, feed-forward 1,024, dropout .2, no mask, learning rate "
    "1e-4. Two "
    "numbers of the test set are wrong, in sequences of two numbers, of which the training set has "
    "seven.",
    "en-es-base": SMALL_EN_ES + BUSY,
    "en-es-postnorm": SMALL_EN_ES + "Width and budget are those of en-es/base here. " + BUSY,
    "en-es-torch-mha": SMALL_EN_ES
    + "Width and budget are those of en-es/base here. At this width torch's "
    "module translates as well as ours: the failure in the source report is not reproduced. "
    + BUSY,
    "en-es-greedy": SMALL_EN_ES
    + "The source report's sentence becomes “No te quedes miedo de cosas "
    "nuevo .”",
    "en-es-beam": SMALL_EN_ES
    + "The source report's sentence becomes “No seas miedo de cosas nuevo .”, and "
    "“I want to spend more time with Tom .” becomes “Quiero pasar más tiempo con Tom .”, which is "
    "its "
    "reference.",
    "en-fr-base": "The weights of epoch 7, the best of 10 on the validation data. " + BUSY,
    "en-fr-base-beam-4": "The same weights, decoded with a beam of 4.",
}
