"""SafeTensors in, a verified GGUF out, without PyTorch.

Runs as its own short-lived process (`llorch-convert`, `python -m worker.convert`).
"""
