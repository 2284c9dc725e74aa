#: name = "links out, pipes and sockets"
#: right = ["ok"]

ln -s / root; ln -s /etc/passwd p; ln -s .. up; ln -s /dev/shm shm; ln -s loop loop; mkfifo pipe; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("sock")'
