"""What is known of reasoning rows, for callbacks and for ``evaluate.py reason``; no callback.

=============  =====================================================================================
file           what it holds
=============  =====================================================================================
``questions``  questions in batches, what a model writes to them, and whether that is right
``thinking``   what a model has thought while it read, as values and as text
=============  =====================================================================================
"""
