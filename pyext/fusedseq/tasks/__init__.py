"""The documented tasks, how they are trained and evaluated, and the commands for it.

words, ptb, reverse, en_es, en_fr: a module per task, with its settings and presets
catalog: the tasks and the operator sets by name    commands: the commands of `fusedseq`
training: the trainer    runs: one run from its settings to its result    studies: many runs
experiments: the experiments of the source reports, their reported values and our results
translation, adaptation, evaluation: what several tasks or commands share
"""
