#include "csrc/barrier/messages.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace jaxmp::barrier {
namespace {

// The head before the lists and the text: the lengths of the three lists and of the text, the kind, the five numbers.
constexpr size_t kHead = 4 * sizeof(uint32_t) + sizeof(Kind) + 5 * sizeof(uint64_t);
constexpr uint32_t kLongestText = 1 << 20, kLongestList = 1 << 20;

}  // namespace

std::string Encode(const Message& message) {
  std::string bytes;
  const auto put = [&bytes](const auto& value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof(value)); };
  const std::string text = message.text.substr(0, kLongestText);
  for (const auto* list : {&message.tokens, &message.members, &message.ranks}) put(static_cast<uint32_t>(list->size()));
  put(static_cast<uint32_t>(text.size()));
  put(message.kind);
  for (uint64_t number : {message.place, message.key, message.run, message.count, message.digest}) put(number);
  for (const auto* list : {&message.tokens, &message.members, &message.ranks}) {
    for (uint64_t number : *list) put(number);
  }
  return bytes + text;
}

Decoded Decode(std::string* bytes, Message* message) {
  if (bytes->size() < kHead) return Decoded::kIncomplete;
  const char* at = bytes->data();
  const auto take = [&at](auto* value) {
    std::memcpy(value, at, sizeof(*value));
    at += sizeof(*value);
  };
  uint32_t lengths[3] = {}, size = 0;
  uint8_t kind = 0;
  for (uint32_t& length : lengths) take(&length);
  take(&size);
  take(&kind);
  size_t whole = kHead + size;
  for (uint32_t length : lengths) whole += length * sizeof(uint64_t);
  if (size > kLongestText || whole > kLongestList * sizeof(uint64_t) || kind > static_cast<uint8_t>(Kind::kSilence)) {
    return Decoded::kWrong;
  }
  if (bytes->size() < whole) return Decoded::kIncomplete;
  message->kind = static_cast<Kind>(kind);
  for (uint64_t* number : {&message->place, &message->key, &message->run, &message->count, &message->digest}) {
    take(number);
  }
  size_t next = 0;
  for (auto* list : {&message->tokens, &message->members, &message->ranks}) {
    list->resize(lengths[next++]);
    for (uint64_t& number : *list) take(&number);
  }
  message->text.assign(at, size);
  bytes->erase(0, whole);
  return Decoded::kMessage;
}

Socket::Socket(int fd) : fd_(fd) {
  if (fd_ >= 0) fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) | O_NONBLOCK);
}

Socket::Socket(Socket&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), in_(std::move(other.in_)), out_(std::move(other.out_)) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(in_, other.in_);
  std::swap(out_, other.out_);
  return *this;
}

void Socket::Send(const Message& message) {
  out_ += Encode(message);
  Flush();
}

void Socket::Flush() {
  while (is_open() && !out_.empty()) {
    const ssize_t sent = send(fd_, out_.data(), out_.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) {
      // A broken connection is noticed where it is read.
      if (errno != EAGAIN && errno != EWOULDBLOCK) out_.clear();
      return;
    }
    out_.erase(0, static_cast<size_t>(sent));
  }
}

bool Socket::Receive(std::vector<Message>* messages) {
  char buffer[1 << 14];
  for (bool is_over = false; !is_over && is_open();) {
    const ssize_t got = recv(fd_, buffer, sizeof(buffer), 0);
    if (got > 0) {
      in_.append(buffer, static_cast<size_t>(got));
    } else if (got < 0 && errno == EINTR) {
      continue;
    } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      is_over = true;
    } else {
      Close();
    }
  }
  Message message;
  Decoded decoded;
  while ((decoded = Decode(&in_, &message)) == Decoded::kMessage) messages->push_back(message);
  if (decoded == Decoded::kWrong) Close();
  return is_open();
}

void Socket::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

}  // namespace jaxmp::barrier
