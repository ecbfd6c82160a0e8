"""What a person and later commands learn of a run: console, TensorBoard, result.json.

The paper reports throughput, memory and accuracy (section 3, tables 1 to 5); this package is where ours come from. It
lives in one process, the parent of a run: the workers send it messages, so that loss and accuracy are shown once, as
numbers, whichever process computed them. Importing this package imports nothing else.
"""
