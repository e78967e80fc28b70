"""Converts a SafeTensors checkpoint into a verified GGUF file, without PyTorch.

Runs in a short-lived process of its own (`worker.commands.convert`).
"""
