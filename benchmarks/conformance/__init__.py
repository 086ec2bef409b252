"""SGLang's own tests on servers that compress."""
