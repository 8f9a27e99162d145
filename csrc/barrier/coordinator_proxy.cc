#include "csrc/barrier/coordinator_proxy.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

namespace jaxmp {
namespace {

using Clock = std::chrono::steady_clock;

// The two ends of one connection: closed when neither direction is copied any more.
struct Ends {
  Ends(int client, int service) : client(client), service(service) {}
  ~Ends() {
    close(client);
    close(service);
  }
  Ends(const Ends&) = delete;

  const int client, service;
  std::atomic<bool> has_client{true};
};

std::atomic<Clock::rep> lost_at{0};  // 0: not

// Copies until the source ends; what the target takes no more is dropped, and the source not told.
void Copy(int from, int to) {
  char buffer[1 << 14];
  for (;;) {
    const ssize_t got = recv(from, buffer, sizeof(buffer), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return;
    for (ssize_t sent = 0; sent < got;) {
      const ssize_t n = send(to, buffer + sent, static_cast<size_t>(got - sent), MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) break;
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

// One connection. The client is told of no end but its own, and that a service could not be reached at first, which it
// tries again.
void Serve(int client, const std::string& host, const std::string& port) {
  const int service = Connect(host, port);
  if (service < 0) {
    close(client);
    return;
  }
  const auto ends = std::make_shared<Ends>(client, service);
  std::thread([ends] {
    Copy(ends->service, ends->client);
    if (ends->has_client) lost_at = Clock::now().time_since_epoch().count();
  }).detach();
  Copy(client, service);
  ends->has_client = false;
  shutdown(service, SHUT_RDWR);  // ends the other thread
}

// Whether the socket at the other end of `client` is this process's: JAX's client is. Others on this machine have to go
// to the service themselves.
bool IsOurs(int client) {
  sockaddr_in theirs = {};
  socklen_t size = sizeof(theirs);
  if (getpeername(client, reinterpret_cast<sockaddr*>(&theirs), &size) != 0) return false;
  DIR* const descriptors = opendir("/proc/self/fd");
  if (!descriptors) return true;  // there is no way to tell
  bool is_found = false;
  while (const dirent* const entry = is_found ? nullptr : readdir(descriptors)) {
    sockaddr_storage address = {};
    size = sizeof(address);
    if (getsockname(std::atoi(entry->d_name), reinterpret_cast<sockaddr*>(&address), &size) != 0) continue;
    if (address.ss_family == AF_INET6) {  // 127.0.0.1 as ::ffff:127.0.0.1; a connection's port on loopback is its own
      is_found = reinterpret_cast<const sockaddr_in6&>(address).sin6_port == theirs.sin_port;
    } else if (address.ss_family == AF_INET) {
      const auto& own = reinterpret_cast<const sockaddr_in&>(address);
      is_found = own.sin_port == theirs.sin_port && own.sin_addr.s_addr == theirs.sin_addr.s_addr;
    }
  }
  closedir(descriptors);
  return is_found;
}

void Accept(int listener, const std::string& host, const std::string& port) {
  for (;;) {
    const int client = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) {  // out of descriptors, perhaps, or the client is gone already
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    } else if (!IsOurs(client)) {
      close(client);
    } else {
      const int on = 1;
      setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      std::thread(Serve, client, host, port).detach();
    }
  }
}

}  // namespace

StatusOr<int> StartCoordinatorProxy(const std::string& host, const std::string& port) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (listener < 0 || bind(listener, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listener, 16) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return Internal("jaxmp: no port on 127.0.0.1 for the coordination service: ", std::strerror(errno));
  }
  std::thread(Accept, listener, host, port).detach();
  return static_cast<int>(ntohs(address.sin_port));
}

double ServiceLostFor() {
  const Clock::rep at = lost_at;
  return at == 0 ? -1 : std::chrono::duration<double>(Clock::now().time_since_epoch() - Clock::duration(at)).count();
}

}  // namespace jaxmp
