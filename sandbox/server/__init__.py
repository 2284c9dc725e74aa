"""The inside of a sandbox: a supervisor that holds the only wire to the host, and the workers it forks from itself.

::

    python3 -I -S -B server '{"connect": "/run/agentgym/sandbox.sock", "work": "/tmp", "branches": "/branches",
                              "wipe": ["/tmp", "/branches"], "limits": {}, "nice": 19, "filter": {}, "arena": {}}'

    frame    4-byte big-endian length | JSON envelope | as many raw bytes as the envelope's "body" says
    host     {"id", "session", "op", ...}                               a call, one at a time; `op` is one of
             python exec start shell run end_shell write write_on read read_on end_transfer list fork end
             snapshot restore reset
             {"id", "answer": k} + JSON body, {"id", "op": "cancel"}    inside a running call
             {"process": n, "op", ...}                                  at any time, without an answer; `op` is one of
             input + bytes, credit, signal, close
    here     {"hello", "python"} once;  {"id", "ask": k} + JSON body;  {"id", ...} ends the call
             {"id", "part": k} + bytes, which the host answers by {"id", "answer": k} + bytes
             {"process": n, ...}                                        at any time, of what `start` started:
             "of": stream + bytes, "closed": stream, "took": input bytes, "exit": code

Session 0 is the trunk. `fork` makes another that goes on from where a session stands: its own process, its own copy of
the working folder. The supervisor alone says what happened: limits, signals, cut output and lost state are facts that
it saw.

Each episode has a supervisor of its own, in a place of its own (`arena`), where the kernel lets the keeper make one;
the code runs in a namespace of processes (`space`) from which neither can be seen. Elsewhere one supervisor resets
the sandbox in place, and goes on as a new program. Either way no episode finds anything of an earlier one in its
memory. Bodies (code, commands, files, output, questions and answers) pass through buffers that are zeroed after use:
the supervisor is also the zygote, and a worker forked later must find nothing of earlier calls in its memory.

    limits < kernel < frames, imports, session_fork, network, bounds < space < children, worker < process_tree, program
    < background < call < shell;  files < transfer, folder_copy, packing < archive
    process_tree < stillness;  call, counters, files, stillness < sessions < snapshots, arena < fresh
    < supervisor, keeper < start

Where a sandbox is given `bytecode` instead of the sources, `__main__` imports the modules from that one file.
Each module imports only what stands to its left; `__main__` imports `start`. Standard library only, Linux 5.3 and
Python 3.9 or newer; nothing here is imported by the host.
"""
