"""What starts SGLang in its own environment; the folder holds nothing else, since Python looks for modules in it."""
