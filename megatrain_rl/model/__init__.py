"""What is streamed: a Hugging Face model as blocks.

layout.py maps a parameter to its place in a flat buffer. decoder.py names the blocks of a model, families/ the models.
template.py runs a layer over a buffer, taps.py and traced.py its backward, attention.py its attention over packs.
hf_io.py reads a model's folder, folder.py checks it, and hf_export.py writes one.
"""
