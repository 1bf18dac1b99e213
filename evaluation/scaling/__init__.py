"""Command ``scaling``: power laws and logarithmic lines through results of several sizes.

===========  =======================================================================================
file         what it holds
===========  =======================================================================================
``command``  options, and what is done
``fit``      the fit, and what a model saves against another
``runs``     result files and the groups they form
``figure``   its picture
===========  =======================================================================================
"""
