"""The engines and libraries that lazyllm is compared with, each in a process of its own."""
