"""Command ``reversal``: the father-son probe of the reversal curse.

===========  =======================================================================================
file         what it holds
===========  =======================================================================================
``command``  options, and what is done
``probe``    its prompts and its numbers
``models``   what it asks: checkpoints, and models of ``transformers``
``names``    its names
``figure``   its picture
===========  =======================================================================================
"""
