"""Command ``gsm8k``: word problems that a model solves in k tries.

==============  ====================================================================================
file            what it holds
==============  ====================================================================================
``command``     options, and what is done
``prompts``     what it reads: demonstrations and a question
``candidates``  what it writes, with a random stream for each try
``answers``     the number that a text gives as its answer
``report``      its numbers
==============  ====================================================================================
"""
