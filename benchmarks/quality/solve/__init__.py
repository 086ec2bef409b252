"""Does a model still solve a problem once what it wrote itself is evicted?"""
