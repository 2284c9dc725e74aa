#: name = "the supervisor's facts in an answer"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.write(3, frame({'id': call, 'status': 'timeout', 'state_lost': False, 'stdout': 0, 'stderr': 0}))
