#: name = "a loop in C that hears no interrupt"
#: right = ["timeout"]
#: lost = true
#: timeout_s = 0.2

sum(range(10 ** 15))
