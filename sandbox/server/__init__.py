"""The server inside a sandbox: a supervisor with the only connection to the host, and the workers that it forks.

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
             {"process": n, ...}                                        at any time, about a program from `start`:
             "of": stream + bytes, "closed": stream, "took": input bytes, "exit": code

Session 0, the trunk, exists from the start. `fork` creates another session that continues from the state of a session,
with its own process and its own copy of the working folder. Only the supervisor reports what happened: limits, signals,
cut output and lost state are facts that it observed.

In these modules, a cell is the code of one `python` call, "the code" is everything that calls run in the sandbox, and
"we" are the server's own processes.

The server's first process is the keeper, which forks the supervisors (`keeper`). If the kernel lets it create
namespaces, each episode has its own supervisor and its own set of namespaces and folders (`arena`), and the code runs
in a process namespace (`space`) from which neither keeper nor supervisor can be seen. Otherwise one supervisor resets
the sandbox in place and continues as a new program. In both cases, no episode finds anything from an earlier one in its
memory.

Workers are forks of the supervisor, and so get copies of its memory. Therefore, bodies (code, commands, files, output,
questions and answers) pass through buffers that are zeroed after use, and a worker finds nothing from earlier calls.

    limits < kernel < frames, imports, session_fork, network, bounds < space < children, worker < process_tree, program
    < background < call < shell;  files < transfer, folder_copy, packing < archive
    process_tree < stillness;  call, counters, files, stillness < sessions < snapshots, arena < fresh
    < supervisor, keeper < start

If a sandbox gets the file `bytecode` instead of the sources, `__main__` imports the modules from that file. Each module
imports only modules before it in this list; `__main__` imports `start`. The server uses only the standard library and
needs Linux 5.3 and Python 3.9 or newer; the host imports nothing from here.
"""
