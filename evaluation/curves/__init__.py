"""Command ``curves``: training curves over tokens and FLOPs.

===========  =======================================================================================
file         what it holds
===========  =======================================================================================
``command``  options, and what is done
``points``   their points, from the log and the checkpoint of a run
``figure``   their picture
===========  =======================================================================================
"""
