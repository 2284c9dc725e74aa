#: name = "a file of the host from a container"
#: right = ["ok"]
#: lost = false
#: kinds = ["docker", "runsc"]
#: uses = ["opens"]

opens('CANARY')
opens('CANARY', os.O_WRONLY)
opens('/proc/self/root/CANARY')
opens('/proc/1/root/CANARY')
up = '../' * 40
opens(up + 'CANARY')
opens('/proc/self/cwd/' + up + 'CANARY')
opens('/etc/shadow')
