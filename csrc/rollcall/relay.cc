#include "csrc/rollcall/relay.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

namespace jaxmp {
namespace {

// Copies until either side ends. True where it was the source.
bool Copy(int from, int to) {
  char buffer[1 << 14];
  for (;;) {
    const ssize_t got = recv(from, buffer, sizeof(buffer), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return true;
    for (ssize_t sent = 0; sent < got;) {
      const ssize_t n = send(to, buffer + sent, static_cast<size_t>(got - sent), MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      sent += n;
    }
  }
}

int Connect(const std::string& host, const std::string& port) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return -1;
  int fd = -1;
  for (const addrinfo* at = found; at && fd < 0; at = at->ai_next) {
    fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, at->ai_addr, at->ai_addrlen) != 0) {
      close(fd);
      fd = -1;
    }
  }
  freeaddrinfo(found);
  const int on = 1;
  if (fd >= 0) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return fd;
}

// One connection. The client is told of no end but its own and of no service that it could not reach at first, which it
// tries again.
void Serve(int client, const std::string& host, const std::string& port) {
  const int service = Connect(host, port);
  if (service < 0) {
    close(client);
    return;
  }
  std::thread([client, service] { Copy(service, client); }).detach();
  Copy(client, service);
  shutdown(service, SHUT_RDWR);  // ends the other thread; descriptors stay, a handful per process
}

}  // namespace

StatusOr<int> StartRelay(const std::string& host, const std::string& port) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (listener < 0 || bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listener, 16) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return Internal(std::string("jaxmp: no port on 127.0.0.1 for the coordination service: ") + std::strerror(errno));
  }
  std::thread([listener, host, port] {
    for (int client; (client = accept(listener, nullptr, nullptr)) >= 0 || errno == EINTR;) {
      if (client < 0) continue;
      const int on = 1;
      setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      std::thread(Serve, client, host, port).detach();
    }
  }).detach();
  return static_cast<int>(ntohs(address.sin_port));
}

}  // namespace jaxmp
