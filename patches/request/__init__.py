"""One request and its row: what SGLang's `Req` is read and written for, positions, bounds, reserves."""
