"""Asks an API of Tandem whether it works, as `helm test` does: python ask_api.py URL TOKEN-FILE."""

import json
import sys
import time
import urllib.error
import urllib.request

DEADLINE_S = 120.0


def ask(path: str, token: str = "", body: bytes | None = None) -> tuple[int, str]:
    """Status and text of an answer; status 0 where there is none."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(sys.argv[1] + path, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def main() -> int:
    with open(sys.argv[2]) as file:
        token = file.read().strip()
    begin = time.monotonic()
    while (found := ask("/readyz"))[0] != 200:
        if time.monotonic() - begin > DEADLINE_S:
            print(f"/readyz: {found}")
            return 1
        time.sleep(1)
    wanted = {
        "POST /v1/runs without a token": (ask("/v1/runs", body=b"{}"), 401),
        "POST /v1/runs of a viewer": (ask("/v1/runs", token, body=b"{}"), 403),
        "GET /v1/nodes of a viewer": (ask("/v1/nodes", token), 200),
        "GET /v1/runs of a viewer": (ask("/v1/runs", token), 200),
    }
    for what, ((status, text), right) in wanted.items():
        print(f"{what}: {status}")
        if status != right:
            print(text[:1000])
    version = json.loads(ask("/healthz")[1])["version"]
    good = all(status == right for (status, _), right in wanted.values())
    print(f"Tandem {version} {'answers' if good else 'does not answer as it should'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
