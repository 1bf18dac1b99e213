"""A language model says where the steps of GSM8K's problems go; `align` is its command.

| file | what it holds |
|---|---|
| `run` | `place_steps`: asks about all problems, and goes on where it was stopped |
| `prompt` | what is asked, and how a reply is checked |
| `chat_endpoint` | the model behind HTTP: pace, tries again, the key |
"""
