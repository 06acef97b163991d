"""Writes a checkpoint in a format that other programs read, with the command `jaxpar export`.

- hugging_face.py: the model as a directory for `transformers` or `sentence-transformers`
- program.py: the model as a StableHLO program with its parameters, which runs without jaxpar
- output.py: outputs that appear only when they are complete; every array of a checkpoint as one safetensors file
- command.py: the command line
"""
