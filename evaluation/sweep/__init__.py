"""Command ``sweep``: perplexity against steps and FLOPs, of several checkpoints.

===========  =======================================================================================
file         what it holds
===========  =======================================================================================
``command``  options, and what is done
``dials``    fields that are turned, and their values
``points``   its points, and which of them no other one beats
``table``    its table
``figure``   its picture
===========  =======================================================================================
"""
