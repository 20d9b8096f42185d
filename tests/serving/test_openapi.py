"""The description of the API and the API, held together by schemathesis: what it sends, and what comes back."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from servers import make_translator, serving

from qknorm.serving.limits import Limits

OPERATIONS = [
    ("POST", "/translate"),
    ("POST", "/translate/stream"),
    ("POST", "/attention"),
    ("GET", "/attention/{ticket}"),
    ("GET", "/pairs"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
]
CHECKS = {
    # no schema can say how long texts may be together
    "positive_data_acceptance": {"expected-statuses": ["2xx", "404", "413"]},
    "negative_data_rejection": {"expected-statuses": ["400", "404", "413", "415", "422"]},
}
REPEATABLE = settings(
    max_examples=12,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def description():
    api = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    # short texts, so that what is sent takes the model no time
    with serving({"gl-en": make_translator()}, Limits(characters=60, batch_wait_ms=0)) as server:
        config = api.Config.from_dict({"checks": CHECKS})
        yield api.openapi.from_url(f"{server.address}/openapi.json", config=config)


def test_every_path_is_described(description):
    found = [result.ok() for result in description.get_all_operations()]
    assert {(each.method.upper(), each.path) for each in found} == set(OPERATIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(*operation, "POSITIVE") for operation in OPERATIONS]
    + [(*operation, "NEGATIVE") for operation in OPERATIONS if operation[0] == "POST"],
)
def test_answers_are_as_described(description, method, path, mode):
    from schemathesis.generation import GenerationMode

    operation = description[path][method]

    @REPEATABLE
    @given(st.data())
    def check(data):
        case = data.draw(operation.as_strategy(generation_mode=GenerationMode[mode]))
        case.call_and_validate(timeout=30)

    check()


def test_the_description_tells_the_limits(description):
    asked = description.raw_schema["components"]["schemas"]["TranslateRequest"]["properties"]
    assert asked["text"]["anyOf"][0]["maxLength"] == 60
    assert asked["pair"]["anyOf"][0]["enum"] == ["gl-en"]
    assert asked["nbest"]["maximum"] == asked["beam"]["anyOf"][0]["maximum"] == 8
