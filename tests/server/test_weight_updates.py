"""New weights for a running server."""

from __future__ import annotations

from harness import Client, assert_pool_is_whole, compression, prompt


def update(client: Client, folder) -> None:
    response = client.post("/update_weights_from_disk", model_path=str(folder))
    assert response.status_code == 200, response.text


def test_updates_are_said_in_one_line(serve, tiny):
    """Prevents silently scoring with statistics of other weights, and a log full of one update's parts."""
    client = serve()

    def said() -> int:
        return client.server.log_path.read_text().count("The weights were updated, but TriAttention goes on scoring")

    before = said()
    compression(client.generate(prompt(70, 20), 120))
    update(client, tiny.path)
    assert said() == before + 1
    update(client, tiny.path)
    assert said() == before + 1
    assert compression(client.generate(prompt(71, 20), 120))["rounds"] == 1
    update(client, tiny.path)
    assert said() == before + 2
    assert_pool_is_whole(client)
