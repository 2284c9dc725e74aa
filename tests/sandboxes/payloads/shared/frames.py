# `frame` makes one, `worker()` is the one that runs this cell, `call` is the call's id.
import json, os, struct, sys, threading, time
def frame(envelope, body=b""):
    if body: envelope = {**envelope, "body": len(body)}
    head = envelope if isinstance(envelope, bytes) else json.dumps(envelope).encode()
    return struct.pack(">I", len(head)) + head + body
def worker():
    here = sys._getframe()
    while type(here.f_locals.get("self")).__name__ != "Worker": here = here.f_back
    return here.f_locals["self"]
call = worker().call
