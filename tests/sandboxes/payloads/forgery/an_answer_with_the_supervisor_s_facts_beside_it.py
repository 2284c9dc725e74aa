#: name = "an answer with the supervisor's facts beside it"
#: right = ["ok", "error"]
#: following = ["ok", "error"]
#: uses = ["frames"]
# The exit may be seen first, or only by the next call, which then says that its state was lost.

os.write(3, frame({'id': call, 'done': 0, 'status': 'oom', 'exit_code': -9, 'seconds': 1e9, 'stdout': 99}))
os._exit(0)
