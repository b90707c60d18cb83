"""Compute the mock Hub's answers. Each route has a function."""
import base64
import hashlib
import json
import time
from typing import Any
from urllib.parse import quote

from .http import ERRORS, Answer, Handler, route
from .store import LARGE, File

_REPO = r"(?P<repo>[^/]+/[^/]+)"
_REV = r"(?P<revision>[^/]+)"


# ------------------------------------------------------------------------------------- the Hub as a whole
@route("GET", "/api/agent-harnesses")
def _harnesses(http: Handler) -> None:
    http.json({"standardEnvVars": [], "harnesses": {}})


@route("POST", "/api/validate-yaml")
def _validate(http: Handler) -> None:
    text = http.given()["content"]
    errors = [] if text.startswith("---\n") else [{"message": "the card has no metadata"}]
    http.json({"errors": errors, "warnings": []}, 400 if errors else 200)


@route("POST", "/api/repos/create")
def _create(http: Handler) -> None:
    user, given = http.user(), http.given()
    if user is None:
        raise Answer(401, "Invalid username or password")
    owner = given.get("organization") or user[0]
    if user != (owner, "write"):
        raise Answer(403, ERRORS[403])
    repo_id = f"{owner}/{given['name']}"
    existed = repo_id in http.hub.repositories
    if not existed:
        private = given.get("private", given.get("visibility") == "private")
        http.hub.create_repo(repo_id, private=bool(private))
    described = {"url": f"{http.hub.endpoint}/{repo_id}", "name": repo_id, "id": repo_id}
    if existed:
        described["error"] = "You already created this model repo"
    http.json(described, 409 if existed else 200)


# ------------------------------------------------------------------------------------------ a repository
@route("GET", f"/api/models/{_REPO}")
@route("GET", f"/api/models/{_REPO}/revision/{_REV}")
def _info(http: Handler, repo: str, revision: str = "main") -> None:
    repository = http.repository(repo)
    commit = http.at(repository, revision)
    http.json({
        "id": repo, "modelId": repo, "sha": commit.oid, "private": repository.private,
        "gated": "manual" if repository.gated else False, "tags": [], "downloads": 0, "likes": 0,
        "siblings": [{"rfilename": path} for path in sorted(commit.files)],
    })


@route("POST", f"/api/models/{_REPO}/branch/{_REV}")
def _branch(http: Handler, repo: str, revision: str) -> None:
    repository = http.writable(repo)
    if revision in repository.branches:
        raise Answer(409, f"Reference refs/heads/{revision} already exists")
    start = http.given().get("startingPoint", "main") if http.body else "main"
    repository.branches[revision] = http.at(repository, start).oid
    http.json({})


# ---------------------------------------------------------------------------------------------- uploads
@route("POST", f"/api/models/{_REPO}/preupload/{_REV}")
def _preupload(http: Handler, repo: str, revision: str) -> None:
    files = http.at(http.writable(repo), revision).files

    def mode(path: str, size: int) -> str:
        return "lfs" if path.endswith(LARGE) or size > 10_000_000 else "regular"

    rows = [{"path": given["path"], "uploadMode": mode(given["path"], given["size"]), "shouldIgnore": False}
            for given in http.given()["files"]]
    for row in rows:
        if row["path"] in files:
            row["oid"] = files[row["path"]].etag
    http.json({"files": rows})


@route("GET", f"/api/models/{_REPO}/xet-(?P<kind>read|write)-token/{_REV}")
def _xet_token(http: Handler, repo: str, kind: str, revision: str) -> None:
    http.repository(repo, content=True) if kind == "read" else http.writable(repo)
    address, expires = f"local://{http.hub.folder}", int(time.time()) + 3600
    http.json({"accessToken": "xet", "exp": expires, "casUrl": address}, **{
        "X-Xet-Cas-Url": address, "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": str(expires)})


@route("POST", rf"/{_REPO}\.git/info/lfs/objects/batch")
def _lfs_batch(http: Handler, repo: str) -> None:
    http.writable(repo)
    objects = [_lfs_actions(http.hub, repo, row["oid"], row["size"]) for row in http.given()["objects"]]
    http.json({"transfer": "basic", "objects": objects})


def _lfs_actions(hub: Any, repo: str, oid: str, size: int) -> dict[str, Any]:
    described: dict[str, Any] = {"oid": oid, "size": size}
    if hub.uploaded(oid, size):
        return described
    upload: dict[str, Any] = {"href": f"{hub.storage}/blobs/{oid}"}
    verify = {"href": f"{hub.endpoint}/{repo}.git/info/lfs/verify"}
    return {**described, "authenticated": True, "actions": {"upload": upload, "verify": verify}}


@route("PUT", "/blobs/(?P<oid>[0-9a-f]{64})")
def _put(http: Handler, oid: str) -> None:
    if hashlib.sha256(http.body).hexdigest() != oid:
        raise Answer(400, "the content does not have the announced SHA-256")
    http.hub.blobs[oid] = http.body
    http.send(200)


@route("POST", rf"/{_REPO}\.git/info/lfs/verify")
def _verify(http: Handler, repo: str) -> None:
    http.writable(repo)
    given = http.given()
    if http.hub.uploaded(given["oid"], given["size"]) is None:
        raise Answer(404, "the object was not uploaded")
    http.json({})


@route("POST", f"/api/models/{_REPO}/commit/{_REV}")
def _commit(http: Handler, repo: str, revision: str) -> None:
    with http.hub.lock:
        repository = http.writable(repo)
        opens = http.query.get("create_pr") == "1"
        lines = [json.loads(line) for line in http.body.splitlines() if line]
        files, title = dict(http.at(repository, revision).files), "commit"
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                title = value["summary"]
            else:
                _apply(http.hub, files, line["key"], value)
        number = 1 + sum(name.startswith("refs/pr/") for name in repository.branches)
        commit = repository.add(files, title, f"refs/pr/{number}" if opens else revision)
    answer = {"success": True, "commitOid": commit.oid, "commitUrl": f"{http.hub.endpoint}/{repo}/commit/{commit.oid}"}
    if opens:
        answer["pullRequestUrl"] = f"{http.hub.endpoint}/{repo}/discussions/{number}"
    http.json(answer)


def _apply(hub: Any, files: dict[str, File], key: str, value: dict[str, Any]) -> None:
    """Apply one line of a commit to ``files``. At the first line, it equals the parent commit's."""
    path = value["path"]
    if key == "file":
        files[path] = hub.store(base64.b64decode(value["content"]), large=False)
    elif key == "lfsFile":
        file = hub.uploaded(value["oid"], value["size"])
        if file is None:
            raise Answer(400, f"the upload of {path} is not complete")
        files[path] = file
    else:
        raise Answer(400, f"unknown line {key!r} in a commit")


# -------------------------------------------------------------------------------------------- downloads
@route("HEAD GET", f"/{_REPO}/resolve/{_REV}/(?P<path>.+)")
def _resolve(http: Handler, repo: str, revision: str, path: str) -> None:
    commit = http.at(http.repository(repo, content=True), revision)
    file = commit.files.get(path)
    if file is None:
        raise Answer(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": commit.oid})
    described = {"X-Repo-Commit": commit.oid}
    if not file.large:
        http.send(200, http.hub.blobs[file.sha256], ETag=f'"{file.oid}"', **described)
        return
    described |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(file.size)}
    if file.xet:
        refresh = f"{http.hub.endpoint}/api/models/{repo}/xet-read-token/{quote(commit.oid)}"
        described |= {"X-Xet-Hash": file.xet, "Link": f'<{refresh}>; rel="xet-auth"'}
    http.send(302, Location=f"{http.hub.storage}/blobs/{file.sha256}", **described)


@route("HEAD GET", "/blobs/(?P<oid>[0-9a-f]{64})")
def _get_blob(http: Handler, oid: str) -> None:
    if oid not in http.hub.blobs:
        raise Answer(501, "no content has this SHA-256; if it was uploaded with xet, only xet can download it")
    http.send(200, http.hub.blobs[oid], ETag=f'"{oid}"')
