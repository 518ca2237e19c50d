"""The HTTP server against its own OpenAPI description: schemathesis makes the requests."""

from typing import Any

import httpx
import hypothesis
import pytest
from fake_engine import FakeEngine
from serving import KEY, running

ALL: Any = hypothesis.HealthCheck
schemathesis = pytest.importorskip("schemathesis")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of schemathesis
def test_answers_are_as_described():
    from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

    with running(FakeEngine(), grpc=None, keys=(KEY,)) as server:
        url, headers = f"http://127.0.0.1:{server.http_port}", {"authorization": f"Bearer {KEY}"}
        schema = schemathesis.openapi.from_dict(httpx.get(url + "/openapi.json").json())
        seen = set()
        for operation in [result.ok() for result in schema.get_all_operations()]:

            @hypothesis.settings(max_examples=150, deadline=None, suppress_health_check=[*ALL])
            @hypothesis.given(case=operation.as_strategy())
            def check(case):
                response = case.call(base_url=url, headers=headers)
                seen.add((case.operation.path, response.status_code))
                # not asked: that whatever fits the schema works (the context is finite), and what keys do (test_keys)
                case.validate_response(response, excluded_checks=[ignored_auth, positive_data_acceptance])

            check()
        assert {path for path, _ in seen} == set(httpx.get(url + "/openapi.json").json()["paths"])
        assert not any(status >= 500 for _, status in seen)
        assert ("/v1/completions", 400) in seen
