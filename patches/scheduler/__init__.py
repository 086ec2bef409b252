"""What SGLang's scheduler does with requests: admission, release, conversations, disaggregation."""
