"""Command ``compare``: any set of runs as one table, with plots and a report.

============  ======================================================================================
file          what it holds
============  ======================================================================================
``command``   options, and what is done
``found``     the runs that the command line names: checkpoint, log, record
``record``    what the ``config.yaml`` of a run says
``training``  what a run was trained on, and what that cost
``scoring``   its likelihood of held-out text, and the FLOPs of inference
``results``   result files of other commands: scores to take over, tasks
``measured``  all that is known of one run
``rows``      runs that differ in the seed only as one row; names and order of rows
``checks``    what runs have in common, and what not
``columns``   the columns of the table
``figure``    loss against tokens, training FLOPs and inference FLOPs
``tables``    the tables, for people and for CSV files
``report``    all of it in words and tables, whatever the format
``page``      the report as one HTML file that needs nothing else
``files``     the folder with the report, whole or not there
============  ======================================================================================
"""
