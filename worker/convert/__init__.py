"""SafeTensors in, a verified GGUF out, without PyTorch.

Runs as a short-lived process of its own (`worker.commands.convert`).
"""
