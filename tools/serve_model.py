"""Serve a prepared model with TriAttention in the foreground, until Ctrl-C."""

import argparse

import prepare_model
from env import fail
from server import (
    ServerError,
    exit_on_signals,
    launch_command,
    port_is_free,
    running_process,
    triattention_args,
    wait_until_healthy,
)

CURL = """
ready; for example:
  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{"model": "default", \
"max_tokens": 600, "messages": [{{"role": "user", "content": "Explain how a bicycle stays upright."}}]}}'
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--port", type=int, default=30000)
    prepare_model.add_model_option(parser)
    options, user_args = parser.parse_known_args()
    if not port_is_free(options.port):
        fail(f"port {options.port} is taken: choose another, `make serve PORT={options.port + 1}`.")
    exit_on_signals()
    try:
        model, stats = prepare_model.prepare(options.model)
        command = launch_command(model, options.port, [*triattention_args(stats), *user_args])
        with running_process(command, options.port) as server:
            wait_until_healthy(server)
            print(CURL.format(url=server.url), flush=True)
            fail(f"the server ended by itself, with exit code {server.process.wait()}.")
    except ServerError as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("stopped")


if __name__ == "__main__":
    main()
