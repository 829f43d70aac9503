"""Where vocabularies come from: GGUF files, Hugging Face directories, tokenizer libraries."""
