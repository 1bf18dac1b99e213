"""Runs and checkpoints: where they are, what they are called, what they have logged.

===========  =======================================================================================
file         what it holds
===========  =======================================================================================
``folders``  runs and checkpoints by folder, file or pattern
``labels``   what runs are called: by what their models differ in
``events``   what a run has logged
===========  =======================================================================================
"""
