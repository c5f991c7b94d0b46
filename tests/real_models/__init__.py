"""The tables of the README, of a real model: `python -m tests.real_models table`.

`files` finds the model and the texts, `rows` quantizes and measures, `by_llama_cpp` has
llama.cpp quantize the same model, and `tables` prints Markdown.
"""
