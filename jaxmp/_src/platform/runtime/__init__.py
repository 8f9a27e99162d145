"""The extension, CUDA's libraries, the environment, logs, and utilities for arrays and text."""
