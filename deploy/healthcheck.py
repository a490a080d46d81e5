"""`healthcheck.py PORT`: exit status 0 when the process of this container says at /ready that it can take work.

What it answers is printed, so `docker inspect` shows why one is not ready. The standard library alone: it runs often.
"""

import http.client
import sys

connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=4)
try:
    connection.request("GET", "/ready")
    response = connection.getresponse()
    print(response.read(1000).decode(errors="replace"))
except (OSError, http.client.HTTPException) as error:
    sys.exit(f"no answer at port {sys.argv[1]}: {error}")
sys.exit(response.status != 200)
