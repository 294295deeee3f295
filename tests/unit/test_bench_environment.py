"""The environment file: what is taken, and the line that says what is wrong."""

import json
from pathlib import Path

import pytest

from kvcsfs.bench.environment import Node, load_environment
from kvcsfs.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "bench-environment.json"


def load(tmp_path, document):
    file = tmp_path / "e.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return load_environment(file)


def test_defaults_need_no_file():
    environment = load_environment(None)
    assert environment.nodes == [Node()]
    assert environment.sizes == [(1 << 20, 1.0)]


def test_the_example_is_valid_and_names_every_field():
    environment = load_environment(EXAMPLE)
    assert set(json.loads(EXAMPLE.read_text())) == set(environment.__struct_fields__)


def test_a_distribution_of_sizes(tmp_path):
    environment = load(tmp_path, {"value_size": [{"size": "64KiB", "share": 3}, {"size": 4096, "share": 1}]})
    assert environment.sizes == [(65536, 3.0), (4096, 1.0)]


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ('{"keys": "many"}', "e.json: keys: expected int, got str"),
        ('{"keys": 0}', "e.json: keys: expected int >= 1"),
        ('{"kees": 1}', "unknown field kees"),
        ('{"client": {"verify": true}}', "e.json: client: object contains unknown field verify"),
        ('{"client": {"get_workers": -1}}', "e.json: client.get_workers: expected int >= 0"),
        ('{"value_size": "4 megs"}', 'e.json: value_size: expected a size such as "100GiB"'),
        ('{"value_size": "0KiB"}', "e.json: value_size: expected more than 0 bytes"),
        ('{"value_size": []}', "e.json: value_size: expected array of length >= 1"),
        ('{"value_size": [{"size": "x", "share": 1}]}', "e.json: value_size[0].size: expected a size"),
        ('{"value_size": [{"size": 1, "share": 0}]}', "e.json: value_size[0].share: expected float > 0"),
        ('{"value_size": [{"size": 1, "share": 1e308}]}', "share: expected float <= 1000000000.0"),
        ('{"read_share": 1.5}', "e.json: read_share: expected float <= 1"),
        ('{"duration_s": 0}', "e.json: duration_s: expected float > 0"),
        ('{"buffer_memory": "lots"}', "e.json: buffer_memory: expected a size"),
        ('{"nodes": []}', "e.json: nodes: expected array of length >= 1"),
        ('{"nodes": [{}, {"host": "elsewhere"}]}', "e.json: nodes[1].host: 'elsewhere' is another machine"),
        ('{"nodes": [{"socket": ""}]}', "e.json: nodes[0].socket: expected a path"),
        ('{"key_prefix": "/a"}', "e.json: key_prefix: expected a text"),
        ('{"key_prefix": "' + "a" * 161 + '"}', "e.json: key_prefix: expected at most 160 bytes"),
        ("{", "e.json: not valid JSON"),
        ("[]", "e.json: expected object, got array"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_field(tmp_path, document, says):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, document)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: can't be read: No such file"):
        load_environment(tmp_path / "none.json")
